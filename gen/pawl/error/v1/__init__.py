"""Generated from proto/pawl/error/v1 by `make proto`. Do not edit."""
