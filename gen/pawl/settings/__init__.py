"""Generated from proto/pawl/settings by `make proto`. Do not edit."""
