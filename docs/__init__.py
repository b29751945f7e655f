"""The documentation, and what makes its generated parts."""
