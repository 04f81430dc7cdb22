"""The demonstration: a tiny model, a real server, and seeded load on it."""
