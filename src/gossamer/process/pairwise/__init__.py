"""PairwiseExchanges between two neighbours: connections, pairing, the exchange itself."""
