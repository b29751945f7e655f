"""Acknowledged data survives a power cut, which unlike kill -9 also loses the page cache."""
