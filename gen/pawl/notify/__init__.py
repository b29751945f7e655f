"""Generated from proto/pawl/notify by `make proto`. Do not edit."""
