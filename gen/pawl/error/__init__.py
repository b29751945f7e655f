"""Generated from proto/pawl/error by `make proto`. Do not edit."""
