"""Generated from proto/pawl/batch by `make proto`. Do not edit."""
