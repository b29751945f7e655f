"""Generated from proto/pawl/tool/v1 by `make proto`. Do not edit."""
