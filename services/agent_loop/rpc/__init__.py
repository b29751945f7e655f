"""AgentService over gRPC."""
