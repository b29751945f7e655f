"""Generated from proto/pawl/identity by `make proto`. Do not edit."""
