"""Generated from proto/pawl/agent/v1 by `make proto`. Do not edit."""
