RULES=[
 name("Tokens","PackedSeqParams",text=True,exclude=("megalith/data/*","megalith/cli/*","docs/log.md","CHANGELOG.md","megalith/config/*","README.md")),
 name("Tokens","PackedSeqParams",files=("megalith/data/*",)), regex(r"`Tokens`","`PackedSeqParams`",files=("docs/*","megalith/data/*","README.md","megalith/config/*")),
 name("cu_q","cu_seqlens_q",text=True), name("cu_kv","cu_seqlens_kv",text=True), name("max_q","max_seqlen_q",text=True), name("max_kv","max_seqlen_kv",text=True),
 regex(r"\b(tokens|text|texts|whole|given|one|part|packed|own|given|MEMORIES|TEXTS|seq_params|last|batch\.tokens|context\.whole)\.document\b(?!\()",r"\1.document_ids",files=("megalith/kernels/*","megalith/nn/*","megalith/models/*","megalith/parallel/*","megalith/train/*","megalith/infer/*","tests/*","megalith/verify/*","megalith/data/*","benchmarks/*"),exclude=("tests/cli/*","tests/data/test_indexed.py")),
 regex(r"\b(tokens|text|texts|whole|given|one|part|packed|own|seq_params|last|context\.whole)\.positions\b",r"\1.position_ids",files=("megalith/kernels/*","megalith/nn/*","megalith/models/*","megalith/parallel/*","megalith/train/*","megalith/infer/*","tests/*","megalith/verify/*","megalith/data/*","benchmarks/*")),
 field("PackedSeqParams","positions","position_ids"), field("PackedSeqParams","document","document_ids"), regex(r"self\.positions\.shape\[-1\]","self.position_ids.shape[-1]",files="megalith/kernels/tokens.py"),
 callkw(r"PackedSeqParams","positions","position_ids"), callkw(r"PackedSeqParams","document","document_ids"), callkw("replace","positions","position_ids",first=r".*tokens.*|.*text.*"), callkw("replace","document","document_ids",first=r".*tokens.*"),
]
