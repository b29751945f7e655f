"""Generated from proto/pawl/job by `make proto`. Do not edit."""
