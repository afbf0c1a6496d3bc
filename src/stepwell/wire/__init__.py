"""The shapes that travel over HTTP, and their translation. Pure: nothing here sends or waits."""
