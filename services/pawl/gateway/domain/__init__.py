"""The rules of whom and what the gateway lets in: plain values and functions."""
