"""Documents that users and stores upload, for search."""
