"""Generated from proto/pawl/tool by `make proto`. Do not edit."""
