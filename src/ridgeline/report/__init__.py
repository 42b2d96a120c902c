"""Records as pictures: one self-contained page, images for a README, and the tables of the project's own documents.

Matplotlib and jinja2 (the extra `report`) are imported when something is drawn, never when this package is.
"""
