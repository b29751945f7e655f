"""The folders of the file tools."""
