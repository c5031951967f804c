AG="megalith/parallel/autograd.py"
TA=("tests/parallel/test_autograd.py",)
RULES=[
 regex(r"def enter\(x: Tensor, group","def copy_to_tp(x: Tensor, group",files=AG), regex(r"def leave\(x: Tensor, group","def reduce_from_tp(x: Tensor, group",files=AG), regex(r"def split\(x: Tensor, group","def scatter_to_sp(x: Tensor, group",files=AG), regex(r"def partial\(x: Tensor, group","def mark_partial(x: Tensor, group",files=AG), regex(r"def gather\(x: Tensor, group","def all_gather(x: Tensor, group",files=AG),
 regex(r"`gather`","`all_gather`",files=AG),
 # TPComm's two methods
 attr("enter","prepare_input",files=("megalith/nn/*","megalith/parallel/tensor.py","megalith/parallel/overlap.py","megalith/verify/faults.py","tests/parallel/test_tensor.py","tests/nn/*","tests/parallel/test_overlap.py")), attr("leave","reduce_output",files=("megalith/nn/*","megalith/parallel/tensor.py","megalith/parallel/overlap.py","megalith/verify/faults.py","tests/parallel/test_tensor.py","tests/nn/*","tests/parallel/test_overlap.py")),
 regex(r"def enter\(self, x","def prepare_input(self, x",files=("megalith/parallel/*","tests/*","megalith/verify/*")), regex(r"def leave\(self, x","def reduce_output(self, x",files=("megalith/parallel/*","tests/*","megalith/verify/*")),
 kwarg("enter","prepare_input",files=("megalith/verify/faults.py",)), kwarg("leave","reduce_output",files=("megalith/verify/faults.py",)), name("enter","prepare_input",files="megalith/verify/faults.py"), name("leave","reduce_output",files="megalith/verify/faults.py"),
 # functions
 *(name(a,b,files=("megalith/kernels/cross_entropy.py","megalith/parallel/tensor.py","megalith/parallel/expert.py","megalith/parallel/transports.py")+TA+("tests/parallel/test_fingerprints.py","tests/parallel/test_watch.py","tests/testing/test_inject.py"),exclude=()) for a,b in (("leave","reduce_from_tp"),)),
 name("enter","copy_to_tp",files=("megalith/parallel/tensor.py","tests/parallel/test_fingerprints.py")+TA),
 name("gather","all_gather",files=("megalith/parallel/tensor.py","megalith/parallel/expert.py","megalith/parallel/context.py","tests/parallel/test_tensor.py","tests/parallel/test_fingerprints.py","tests/testing/test_inject.py","tests/nn/test_mlp.py","tests/nn/test_mla.py","tests/nn/test_cross_attention.py")+TA),
 name("split","scatter_to_sp",files=TA),
 name("partial","mark_partial",files=("megalith/kernels/cross_entropy.py","megalith/parallel/tensor.py","megalith/parallel/overlap.py","megalith/nn/lora.py","megalith/verify/faults.py","megalith/train/loss.py","megalith/parallel/expert.py")+TA),
 regex(r"import mark_partial as (with_arguments|partial_of)",r"import partial as \1"), regex(r"functools\.mark_partial","functools.partial"), regex(r"import partial as part_of_sum","import mark_partial",files="megalith/nn/qk_norm.py"), name("part_of_sum","mark_partial",files="megalith/nn/qk_norm.py"),
 *(regex(rf"autograd\.{a}\b",f"autograd.{b}",files=("tests/verify/*","megalith/verify/*")) for a,b in (("enter","copy_to_tp"),("leave","reduce_from_tp"),("gather","all_gather"),("split","scatter_to_sp"),("partial","mark_partial"))),
 regex(r'\*\("enter", "leave", "all_reduce", "gather", "reduce_scatter", "all_gather_invariant", "split", "all_to_all"\)','*("copy_to_tp", "reduce_from_tp", "all_reduce", "all_gather", "reduce_scatter"),\n        *("all_gather_invariant", "scatter_to_sp", "all_to_all")',files="tools/lint_project.py"),
 # region -> tp_comm
 name("region","tp_comm",text=False,files=("megalith/nn/*","megalith/parallel/tensor.py","megalith/parallel/overlap.py","megalith/models/decoder.py","megalith/verify/choice_faults.py","megalith/verify/expert_faults.py","megalith/verify/faults.py","tests/nn/*","tests/parallel/test_tensor.py","tests/parallel/test_overlap.py","tests/parallel/test_rings.py","tests/parallel/test_symm_mem.py","tests/verify/*","benchmarks/*","tests/posttrain/*","tests/equivalence/*","tests/models/test_decoder.py","megalith/posttrain/*","tests/parallel/test_recompute.py","tests/parallel/test_data.py","tests/parallel/test_fsdp.py","tests/parallel/test_postpone.py","tests/plan/test_initial.py"),exclude=("megalith/nn/frozen.py",)),
 name("region","tp_comm",files=("tests/*",),exclude=("tests/plan/*","tests/kernels/*","tests/observe/*","tests/models/test_hf.py","tests/models/test_names.py")),
 name("border","overlapped",files=("megalith/parallel/tensor.py","megalith/parallel/overlap.py","megalith/verify/faults.py","tests/parallel/*","tests/verify/*","tests/nn/*")),
 regex(r"as the region has (it|tokens|them)",r"in the layout of `tp_comm`"), regex(r"over the region's group","over the tensor-parallel group"), regex(r"the region's group","the tensor-parallel group"), 
]
