{{- /* Combinations that no single value shows to be wrong; each with its remedy. */ -}}
{{- define "gna.validate" -}}
{{- $box := dict -}}
{{- include "gna.pools" (list . $box) -}}
{{- range $box.all }}{{ include "gna.validateOne" . }}{{ end -}}
{{- $pools := rest $box.all -}}
{{- range $at, $one := $pools -}}
{{- range $other := slice $pools (add1 $at | int) -}}
{{- if eq $one.Pool $other.Pool -}}
{{- fail (printf "pools has two entries of the name %s: give each its own" $one.Pool) -}}
{{- end -}}
{{- $apart := false -}}
{{- range $label, $value := $one.Values.nodeSelector -}}
{{- if ne (get $other.Values.nodeSelector $label | default $value) $value }}{{ $apart = true }}{{ end -}}
{{- end -}}
{{- if not $apart -}}
{{- fail (printf "pools %s and %s would both select a node that has the labels of both: let their nodeSelectors have one label in common, with different values" $one.Pool $other.Pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A refusal, of the release's own values or of a pool. */ -}}
{{- define "gna.refuse" -}}
{{- $pool := (first .).Pool -}}
{{- fail (printf "%s%s" (empty $pool | ternary "" (printf "pool %s: " $pool)) (last .)) -}}
{{- end -}}

{{- /* Of the release's own values, or with those of a pool over them. */ -}}
{{- define "gna.validateOne" -}}
{{- $v := .Values -}}
{{- if and (eq .Release.Namespace "default") (not $v.allowDefaultNamespace) -}}
{{- include "gna.refuse" (list $ "the agent needs host folders and should not live beside users' pods: install into a namespace of its own (helm install --namespace gpu-node-agent --create-namespace ...), or set allowDefaultNamespace: true") -}}
{{- end -}}
{{- if not (or $v.pgpu.enabled $v.vgpu.enabled $v.mps.enabled $v.dra.enabled) -}}
{{- include "gna.refuse" (list $ "pgpu.enabled, vgpu.enabled, mps.enabled and dra.enabled are all false: nothing would ever be offered; set at least one to true") -}}
{{- end -}}
{{- if and $v.dra.enabled (semverCompare "<1.36.5-0" .Capabilities.KubeVersion.Version) -}}
{{- include "gna.refuse" (list $ (printf "dra.enabled needs Kubernetes 1.36.5 or newer, which this cluster (%s) is not: set it to false" .Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- if and $v.dra.extendedResource (not (and $v.dra.enabled $v.dra.classes)) -}}
{{- include "gna.refuse" (list $ "dra.extendedResource is a field of the DeviceClass gpu-whole: set dra.enabled and dra.classes to true") -}}
{{- end -}}
{{- if and $v.simulator.enabled $v.mps.enabled -}}
{{- include "gna.refuse" (list $ "simulator.enabled and mps.enabled are both true, and there is no simulated MPS on a node: set one of them to false") -}}
{{- end -}}
{{- range $block, $keys := .Files.Get "files/config-keys.yaml" | fromYaml -}}
{{- $given := $block | empty | ternary $v (get $v $block) -}}
{{- $path := $block | empty | ternary "" (printf "%s." $block) -}}
{{- range $key := $keys -}}
{{- if hasKey $given $key -}}
{{- include "gna.refuse" (list $ (printf "%s%s is a key of the agent's configuration: set config.%s%s" $path $key $path $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey $v.config "https" -}}
{{- include "gna.refuse" (list $ "config.https must fit the mounts and monitors, so the chart sets it: use metrics.access instead") -}}
{{- end -}}
{{- if and $v.metrics.access.readers (not $v.metrics.access.secret) -}}
{{- include "gna.refuse" (list $ "metrics.access.readers names accounts, but every pod may read the metrics: set metrics.access.secret, or leave readers empty") -}}
{{- end -}}
{{- if and $v.metrics.access.secret (eq (int $v.metrics.access.port) (int $v.port)) -}}
{{- include "gna.refuse" (list $ (printf "metrics.access.port and port are both %d: give one of them another" (int $v.port))) -}}
{{- end -}}
{{- range $key := list "modes" "http" "version" "simulator" -}}
{{- if hasKey $v.config $key -}}
{{- include "gna.refuse" (list $ (printf "config.%s follows from other values of this chart: use pgpu.enabled, vgpu.enabled, mps.enabled, port or simulator instead" $key)) -}}
{{- end -}}
{{- end -}}
{{- range $block, $keys := dict "kubelet" (list "root" "devicePlugins") "driver" (list "root" "devRoot") "host" (list "state" "run" "cdi" "cgroups" "sysfs") "cluster" (list "nodeName" "kubeconfig") "dra" (list "enabled") "mig" (list "manage") -}}
{{- range $key := $keys -}}
{{- if hasKey (dig $block dict $v.config) $key -}}
{{- $value := get (dict "dra.enabled" "dra.enabled" "mig.manage" "mig.manage" "kubelet.root" "kubelet.root" "kubelet.devicePlugins" "kubelet.devicePlugins" "driver.root" "driver.hostRoot" "driver.devRoot" "driver.devRoot" "host.state" "host.state" "host.cdi" "host.cdi") (printf "%s.%s" $block $key) -}}
{{- include "gna.refuse" (list $ (printf "config.%s.%s must fit the mounts of the DaemonSet, so the chart sets it: %s" $block $key ($value | empty | ternary "take it out" (printf "use the value %s" $value)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey (dig "vgpu" dict $v.config) "resize" -}}
{{- include "gna.refuse" (list $ "config.vgpu.resize follows from vgpu.resizers, for a policy must say who may write the annotation: name the accounts there") -}}
{{- end -}}
{{- if and $v.vgpu.resizers (not (include "gna.enforces" .)) -}}
{{- include "gna.refuse" (list $ "vgpu.resizers names accounts, but without limits there is nothing to resize: set config.vgpu.enforcement to library or strict") -}}
{{- end -}}
{{- if and $v.vgpu.resizers (not (include "gna.policies" .)) -}}
{{- include "gna.refuse" (list $ "vgpu.resizers needs Kubernetes 1.30 or newer, where a policy keeps all other accounts from resizing pods: leave it empty") -}}
{{- end -}}
{{- $compute := toString (dig "vgpu" "compute" "off" $v.config) -}}
{{- if and (has $compute (list "hard" "soft")) (not (has (toString (dig "vgpu" "enforcement" "library" $v.config)) (list "library" "strict"))) -}}
{{- include "gna.refuse" (list $ "config.vgpu.compute is kept by the enforcement library: set config.vgpu.enforcement to library or strict, or compute to off") -}}
{{- end -}}
{{- if and (eq (dig "vgpu" "aboveCap" "report" $v.config) "end") (not (include "gna.hostPID" .)) -}}
{{- include "gna.refuse" (list $ "config.vgpu.aboveCap is end, but without the host's process IDs nobody knows which container is above its cap: set attribution.enabled to auto or true") -}}
{{- end -}}
{{- if and $v.mig.manage (not $v.mig.enabled) -}}
{{- include "gna.refuse" (list $ "mig.manage is true and mig.enabled is false: set both to true, or manage to false") -}}
{{- end -}}
{{- $mode := dig "defaultMode" "none" $v.config -}}
{{- $layouts := dig "layouts" dict $v.config -}}
{{- $words := concat (list "none" "disable" "pgpu" "vgpu" "mps" "mig" "dra") (keys $layouts | sortAlpha) -}}
{{- if not (has $mode $words) -}}
{{- include "gna.refuse" (list $ (printf "config.defaultMode is %s, which is neither a mode nor a layout of config.layouts: use one of %s" $mode (join ", " $words))) -}}
{{- end -}}
{{- range $name, $entries := $layouts -}}
{{- if not $entries -}}
{{- include "gna.refuse" (list $ (printf "config.layouts.%s has no entry: take it out, and label nodes that are to offer nothing nvidia-device-enable=disable" $name)) -}}
{{- end -}}
{{- range $entry := $entries -}}
{{- if and (ne $entry.mode "off") (not (get $v $entry.mode).enabled) -}}
{{- include "gna.refuse" (list $ (printf "config.layouts.%s has GPUs in mode %s, but %s.enabled is false: switch the mode on, or take it out of the layout" $name $entry.mode $entry.mode)) -}}
{{- end -}}
{{- if and $entry.mig (not $v.mig.manage) -}}
{{- include "gna.refuse" (list $ (printf "config.layouts.%s names MIG instances, which the agent makes only with mig.manage: set that to true, or take the key mig out of the layout" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "pgpu" "vgpu" "mps" "mig" "dra" "none" "disable" "enable" "pgpu-dra" "switching" -}}
{{- if hasKey $layouts $name -}}
{{- include "gna.refuse" (list $ (printf "config.layouts.%s has the name of a mode or a word with a meaning of its own: call the layout otherwise" $name)) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "pgpu" "vgpu" "mps" "mig" "dra" -}}
{{- if and (eq $mode $name) (not (get $v $name).enabled) -}}
{{- include "gna.refuse" (list $ (printf "config.defaultMode is %s, but %s.enabled is false: switch the mode on, or choose another default" $name $name)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled -}}
{{- include "gna.refuse" (list $ "metrics.podMonitor and metrics.serviceMonitor are both on: every agent would be scraped twice; leave one of them off") -}}
{{- end -}}
{{- range $kind := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $v.metrics $kind -}}
{{- if and $monitor.enabled (gt (include "gna.milliseconds" $monitor.scrapeTimeout | atoi) (include "gna.milliseconds" $monitor.interval | atoi)) -}}
{{- include "gna.refuse" (list $ (printf "metrics.%s.scrapeTimeout (%s) is longer than its interval (%s), which Prometheus refuses: make it %s or less" $kind $monitor.scrapeTimeout $monitor.interval $monitor.interval)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.hostNetwork -}}
{{- include "gna.refuse" (list $ "networkPolicy does not apply to pods on the host's network: set hostNetwork: false, or networkPolicy.enabled: false") -}}
{{- end -}}
{{- if and (include "gna.quota" .) (not $v.priorityClassName) (not (and $v.extender.enabled $v.extender.priorityClassName)) -}}
{{- include "gna.refuse" (list $ "priorityClassQuota.enabled is true, but no pod has a priority class: leave it off, or set priorityClassName") -}}
{{- end -}}
{{- if eq $v.serviceAccount.name "default" -}}
{{- include "gna.refuse" (list $ "serviceAccount.name is default, the account of every pod that names none: it must not get these rights; give the agent one of its own") -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) (not $v.serviceAccount.name) -}}
{{- include "gna.refuse" (list $ "serviceAccount.create is false and serviceAccount.name is empty: name the account to use; the namespace's default one must not get these rights") -}}
{{- end -}}
{{- if and (include "gna.hostDriver" .) $v.runtimeClassName -}}
{{- $source := ternary "driver.source: host" (printf "preset: %s" $v.preset) (eq $v.driver.source "host") -}}
{{- include "gna.refuse" (list $ (printf "%s mounts the host's driver and needs no NVIDIA runtime for the agent: leave runtimeClassName empty" (ternary "mps.enabled" (ternary "mig.manage" $source (eq (include "gna.parts" .) "true")) $v.mps.enabled))) -}}
{{- end -}}
{{- range $key := list "nameOverride" "fullnameOverride" -}}
{{- $name := get $v $key -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$" $name) -}}
{{- include "gna.refuse" (list $ (printf "%s is %q, but objects of Kubernetes are named with lower-case letters, digits and dashes: use %q" $key $name (regexReplaceAll "[^a-z0-9]+" (lower $name) "-" | trimAll "-"))) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^[a-z]+://|\\s" $v.image.repository -}}
{{- include "gna.refuse" (list $ (printf "image.repository is %q: write it as container runtimes do, without https:// and blanks, for instance registry.example.com/team/gpu-node-agent" $v.image.repository)) -}}
{{- end -}}
{{- $last := last (splitList "/" $v.image.repository) -}}
{{- if or (contains ":" $last) (contains "@" $last) -}}
{{- include "gna.refuse" (list $ (printf "image.repository is %q, which has a tag or a digest in it: leave it out there, and set image.tag" $v.image.repository)) -}}
{{- end -}}
{{- range $v.extraEnv -}}
{{- if or (eq .name "GPU_NODE_AGENT_CONFIG") (eq .name "GPU_NODE_AGENT_CLUSTER_NODE_NAME") -}}
{{- include "gna.refuse" (list $ (printf "extraEnv sets %s, which the chart itself sets: take it out" .name)) -}}
{{- end -}}
{{- end -}}
{{- range $kind, $amounts := $v.resources -}}
{{- range $name, $amount := $amounts -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$" (toString $amount)) -}}
{{- include "gna.refuse" (list $ (printf "resources.%s.%s is %v, which is no quantity: write for instance 50m (cpu) or 256Mi (memory)" $kind $name $amount)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.extender.productServices (not $v.extender.enabled) -}}
{{- include "gna.refuse" (list $ "extender.productServices makes Services of an extender that is not there: set extender.enabled to true, or leave it off") -}}
{{- end -}}
{{- if and $v.extender.enabled (not (include "gna.plainVerbs" .)) (not $v.extender.tls.secret) -}}
{{- include "gna.refuse" (list $ "nothing says how kube-scheduler may ask the extender: name a Secret with certificates in extender.tls.secret; or set extender.config.http.verbs: true (the default of 0.2.0), where every client that reaches port 3456 has GPUs kept and pods bound, and close that port (docs/upgrade.md)") -}}
{{- end -}}
{{- if and $v.extender.productServices (not (include "gna.plainVerbs" .)) -}}
{{- include "gna.refuse" (list $ "extender.productServices leads to the port of plain HTTP, which serves no verbs: set extender.config.http.verbs: true and close that port (docs/upgrade.md), or leave productServices out") -}}
{{- end -}}
{{- range $block, $keys := dict "http" (list "port" "address") "tls" (list "port" "certificate" "key" "clientAuthority") "lease" (list "name" "namespace" "identity") "cluster" (list "kubeconfig") -}}
{{- range $key := $keys -}}
{{- if hasKey (dig $block dict $v.extender.config) $key -}}
{{- include "gna.refuse" (list $ (printf "extender.config.%s.%s must fit the Deployment, its Services and rights, so the chart sets it: take it out" $block $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (or $v.mps.enabled (include "gna.parts" .)) (ne (include "gna.source" .) "host") (not (has $v.driver.hostRoot (list "" "/"))) -}}
{{- include "gna.refuse" (list $ (printf "driver.hostRoot is set and %s takes the driver from there: say so with driver.source: host" (ternary "mps.enabled" "mig.manage" $v.mps.enabled))) -}}
{{- end -}}
{{- end -}}

{{- /* A duration such as 1m30s in milliseconds. */ -}}
{{- define "gna.milliseconds" -}}
{{- $sum := 0 -}}
{{- range $part := regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{- $unit := regexFind "[a-z]+" $part -}}
{{- $sum = add $sum (mul (regexFind "[0-9]+" $part | atoi) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
