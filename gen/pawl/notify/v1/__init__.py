"""Generated from proto/pawl/notify/v1 by `make proto`. Do not edit."""
