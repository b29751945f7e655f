"""Generated from proto/pawl/agent by `make proto`. Do not edit."""
