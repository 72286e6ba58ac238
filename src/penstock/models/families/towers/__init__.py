"""Vision towers: one file a kind, from `vision_config` to a `TowerSpec`."""
