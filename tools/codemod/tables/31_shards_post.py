import sys,re,subprocess
from pathlib import Path
R=Path(sys.argv[1])
files=[R/f for f in subprocess.run(['git','ls-files','*.py'],cwd=R,capture_output=True,text=True).stdout.split()]
# calls of nn.init.fill
for f in files:
    s=f.read_text(); o=s
    m=re.search(r'^from megalith\.nn\.init import (.*)$',s,re.M)
    if m and (re.search(r'\bfill\b',m.group(1)) or 'init_param_' in m.group(1)):
        s=s.replace(m.group(0),re.sub(r'\bfill\b','init_param_',m.group(0)))
        s=re.sub(r'(?<![\w.])fill\(','init_param_(',s)
    m=re.search(r'^from megalith\.plan\.shards import (\([^)]*\)|.*)$',s,re.M)
    if m and f.name!='shards.py' and re.search(r'\b(whole|cut_dim)\b',m.group(1)):
        names=[x.strip() for x in m.group(1).strip('()').replace('\n',' ').split(',') if x.strip()]
        names=sorted({'Shard' if n in('whole','cut_dim') else n for n in names},key=lambda n:(n!=n.upper(),not n[0].isupper(),n))
        line='from megalith.plan.shards import '+', '.join(names)
        if len(line)>100: line='from megalith.plan.shards import (\n    '+',\n    '.join(names)+',\n)'
        s=s.replace(m.group(0),line)
        s=re.sub(r'(?<![\w."])whole\(',"Shard.full(",s); s=re.sub(r'(?<![\w."])cut_dim\(',"Shard.split_dim(",s)
        s=re.sub(r'(?<=[(, =\[])whole(?=, )(?!=)',"Shard.full",s) if 'partial(whole' in s or 'map(whole' in s else s
    if s!=o: f.write_text(s)

f=R/'megalith/plan/shards.py'; s=f.read_text()
m1=re.search(r"^def whole\((.*?)(?=^def )",s,re.M|re.S); s=s.replace(m1.group(0),'')
m2=re.search(r"^def cut_dim\((.*?)(?=^def )",s,re.M|re.S); s=s.replace(m2.group(0),'')
body='''
    @classmethod
    def full(
        cls, name: str, shape: tuple[int, ...], *, invariant: frozenset[str] = frozenset(), inputs: int = 1
    ) -> "Shard":
        """Return the shard of a parameter that every rank holds in full."""
        return cls(name=name, shape=shape, box=tuple((0, n) for n in shape), invariant=invariant, inputs=inputs)

    def split_dim(self, dim: int, sizes: list[int], rank: int, axes: tuple[str, ...]) -> "Shard":
        """Return part number `rank` of this shard when `dim` is split into parts of `sizes` over `axes`."""
        assert sum(sizes) == self.shape[dim], (self.name, self.shape, sizes)
        start = sum(sizes[:rank])
        box = tuple((start, start + sizes[rank]) if d == dim else span for d, span in enumerate(self.box))
        return replace(self, box=box, cut=(*self.cut, *axes))
'''
anchor="        return math.prod(shape[:rows]), math.prod(shape[rows:])\n"
assert anchor in s
s=s.replace(anchor,anchor+body,1)
s=s.replace('`whole(','`Shard.full(').replace('cut_dim','split_dim')
f.write_text(s)
import ast
for f in files:
    while True:
        s=f.read_text()
        if 'Shard.split_dim(' not in s: break
        t=ast.parse(s); done=False
        calls=[n for n in ast.walk(t) if isinstance(n,ast.Call) and isinstance(n.func,ast.Attribute) and ast.unparse(n.func)=='Shard.split_dim' and n.args]
        if not calls: break
        n=calls[-1]
        lines=s.split('\n'); offs=[0]
        for l in lines: offs.append(offs[-1]+len(l.encode())+1)
        b=s.encode()
        pos=lambda r,c: offs[r-1]+c
        a0=n.args[0]; rest=(n.args[1:]+[k.value for k in n.keywords])
        a=b[pos(a0.lineno,a0.col_offset):pos(a0.end_lineno,a0.end_col_offset)]
        if not isinstance(a0,(ast.Name,ast.Call,ast.Attribute,ast.Subscript)): a=b'('+a+b')'
        if len(n.args)>1: st=pos(n.args[1].lineno,n.args[1].col_offset)
        else: st=pos(n.keywords[0].lineno,n.keywords[0].col_offset)
        new=a+b'.split_dim('+b[st:pos(n.end_lineno,n.end_col_offset)]
        b=b[:pos(n.lineno,n.col_offset)]+new+b[pos(n.end_lineno,n.end_col_offset):]
        f.write_bytes(b)
