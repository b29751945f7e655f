"""Generated from proto/pawl/comments by `make proto`. Do not edit."""
