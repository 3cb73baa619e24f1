"""Models on a mesh: axes, plan, tensor and pipeline parallelism, FSDP2, accumulation.

May import: megacpp/ and parallel/.
Start reading: mesh.py, plans.py, apply.py.
"""
