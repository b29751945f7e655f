"""Generated from proto/pawl/settings/v1 by `make proto`. Do not edit."""
