"""Generated from proto/pawl/event/v1 by `make proto`. Do not edit."""
