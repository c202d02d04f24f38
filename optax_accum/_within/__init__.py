"""Within a call: a batch cut, differentiated piece by piece, and put together again."""
