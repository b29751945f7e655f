"""Generated from proto/pawl/job/v1 by `make proto`. Do not edit."""
