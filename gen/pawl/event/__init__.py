"""Generated from proto/pawl/event by `make proto`. Do not edit."""
