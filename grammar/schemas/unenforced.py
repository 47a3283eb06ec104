"""What no grammar holds."""

UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords whose meaning no grammar holds; finished arguments can be checked against them afterwards.

Not always held: overlapping oneOf branches (treated as anyOf), patterns with lookahead or of an unsupported kind, length limits
beside a pattern or format, a maxLength above GrammarLimits.max_counted_length, multipleOf of numbers that are not integers, one
of two patterns or anyOf that apply to the same place, propertyNames and patternProperties beside described properties.
"""
