"""Generated from proto/pawl by `make proto`. Do not edit."""
