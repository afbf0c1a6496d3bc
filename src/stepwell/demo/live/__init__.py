"""`stepwell demo --task live`: a chat service learns from its users as they talk, and a bad update is rolled back."""
