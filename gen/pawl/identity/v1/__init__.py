"""Generated from proto/pawl/identity/v1 by `make proto`. Do not edit."""
