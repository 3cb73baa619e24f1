"""Contracts of the five source articles, one function for each: `pytest tests/contracts -v`.

A function is named after its contract (`test_s0_11_...`); docs/contracts.md has the table of all,
and test_table.py holds the two together. A contract that another test proves calls that proof, at
its smallest size. A contract that doesn't hold yet is a strict `xfail` with the reason: it fails as
soon as the contract holds, and the mark goes. Imports the tests of every room; start with
test_s0.py.
"""
