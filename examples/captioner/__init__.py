"""A small server that captions images, and is traced with stagetrace."""
