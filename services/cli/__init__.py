"""`pawl`: the command line.

A client of the public API only. `client` is a whole client of the Session stream
that other programs may take as their example.
"""
