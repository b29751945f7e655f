"""Builds the source of the documentation site: the pages of docs/ and generated reference pages."""
