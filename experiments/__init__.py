"""What a draft gains or loses by a choice; a row for each draft in reports/experiments.csv.

    python -m experiments.states         # smaller states; top-k targets instead of the last layer

    trial        one draft: trained and judged in a scratch project that borrows this one's data
    top_k        pipeline.train with the target distribution cut to the k likeliest tokens

They start from a finished `make repro`, change nothing in it, and take hours rather than minutes.
"""
