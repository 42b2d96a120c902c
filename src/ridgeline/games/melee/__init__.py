"""Super Smash Bros. Melee: one frame schema for replays, a running console and the championship's protocol."""
