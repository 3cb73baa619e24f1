"""Block kinds and features, one folder each: settings, module, and what other packages read of it.

May import: torch, megacpp/config, megacpp/model, megacpp/kernels; nothing of ranks.
Start reading: m2rnn/module.py.
"""
