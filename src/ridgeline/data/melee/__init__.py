"""Melee replays as a data set: read, checked, encoded, written so that an interrupted preparation goes on."""
