import ast,re,subprocess,sys
from pathlib import Path
R=Path(sys.argv[1])
for f in subprocess.run(['git','ls-files','tests'],cwd=R,capture_output=True,text=True).stdout.split():
    if not f.endswith('.py'): continue
    p=R/f; s=p.read_text(); t=ast.parse(s); lines=s.split('\n'); ch=False
    for n in ast.walk(t):
        if not isinstance(n,ast.FunctionDef): continue
        args=[a.arg for a in n.args.args+n.args.kwonlyargs]
        used=set()
        decs=[]
        for d in n.decorator_list:
            if isinstance(d,ast.Call) and ast.unparse(d.func).endswith('parametrize') and d.args and isinstance(d.args[0],ast.Constant) and isinstance(d.args[0].value,str):
                names=[x.strip() for x in d.args[0].value.split(',')]; decs.append((d.args[0],names)); used|=set(names)
        missing=[(c,x) for c,ns in decs for x in ns if x not in args]
        if not missing: continue
        free=[a for a in args if a not in used or True and a not in('tmp_path','monkeypatch','capsys','request','self','caplog')]
        print(f,n.name,[x for _,x in missing],free)
        for c,x in missing:
            y={"way":"backend","holders":"replica_ranks","mtp":"num_mtp_layers","masters":"master_weights","further":"num_mtp_layers","readout":"logit_transform","products":"matmul_ops"}.get(x,free[0])
            if y in args:
                l=lines[c.lineno-1]; seg=l[c.col_offset:c.end_col_offset]
                lines[c.lineno-1]=l[:c.col_offset]+re.sub(r'\b'+x+r'\b',y,seg)+l[c.end_col_offset:]; ch=True
    if ch: p.write_text('\n'.join(lines))
