//! The qkv cache for candle models.
