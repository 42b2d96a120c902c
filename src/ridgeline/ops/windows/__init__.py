"""Training windows drawn and gathered on a card, from data that lies there (triton.py)."""
