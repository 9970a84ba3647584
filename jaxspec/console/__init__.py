"""What all command lines of the package share.

`command` reads one and says what was wrong with it, `ending` ends its process.
"""
