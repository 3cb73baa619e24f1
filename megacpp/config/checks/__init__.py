"""Rules between settings, by the section that they constrain; each is one line with its fix.

May import: megacpp/ without torch.
Start reading: every.py.
"""
