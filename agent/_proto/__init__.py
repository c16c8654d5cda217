from agent.kit import lean_betterproto2  # noqa: F401
