"""The names of the stages: the last word of an output's key, and a folder below the storage root.

A stage that nothing else reads needs no line here.
"""

from typing import Final

RAW_DATASET: Final = "raw_dataset"
CANONICAL_ROWS: Final = "canonical_rows"
TOKENIZED_EXAMPLES: Final = "tokenized_examples"
TRUNCATION_STATS: Final = "truncation_stats"
PACKED_SHARDS: Final = "packed_shards"
TRAINING_SPLITS: Final = "training_splits"
GPU_PARTITIONS: Final = "gpu_partitions"
EXPORTS: Final = "exports"
"""The second word of an export's key, whose third is its name."""
PARSED_RECORDS: Final = "parsed_records"
GENERATED_SERIES: Final = "generated_series"
TEACHER_SCORES: Final = "teacher_scores"
