"""Generated from proto/pawl/batch/v1 by `make proto`. Do not edit."""
