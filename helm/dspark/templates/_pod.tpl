{{/* The pod of a role: (dict "root" $ "role" "decode" "rank" R) with rank "single", or "leader" or "follower" of a worker
     that is several pods. Only the first pod of a worker serves; the others live and die with it. */}}

{{- define "dspark.pod" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $isWorker := ne .role "router" -}}
metadata:
  labels:
    {{- include "dspark.podLabels" . | nindent 4 }}
    {{- if $isWorker }}
    dspark.io/serves: {{ ternary "false" "true" (eq .rank "follower") | quote }}
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "dspark.config" . | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "dspark.serviceAccountName" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "dspark.grace" . }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- if $values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with (include "dspark.accelerator" . | fromYaml).runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "dspark.spread" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- $isFetched := eq $root.Values.model.source "huggingFace" }}
  {{- if or $isFetched $values.initContainers }}
  initContainers:
    {{- if $isFetched }}
    {{- include "dspark.fetchModel" . | nindent 4 }}
    {{- end }}
    {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "dspark.container" . | nindent 4 }}
  volumes:
    {{- include "dspark.volumes" . | nindent 4 }}
{{- end -}}

{{- define "dspark.container" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $isWorker := ne .role "router" -}}
- name: {{ .role }}
  image: {{ include "dspark.image" . }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args: [{{ .role }}, --config, /etc/dspark/{{ .role }}.yaml]
  env:
    {{- include "dspark.env" . | nindent 4 }}
  {{- with $values.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if ne .rank "follower" }}
  ports:
    - {name: grpc, containerPort: {{ $values.port }}, protocol: TCP}
    - {name: admin, containerPort: {{ $values.adminPort }}, protocol: TCP}
    {{- if eq .rank "leader" }}
    - {name: rendezvous, containerPort: {{ $values.multinode.rendezvousPort }}, protocol: TCP}
    {{- end }}
  startupProbe:
    httpGet: {path: /startupz, port: admin}
    {{- toYaml $values.probes.startup | nindent 4 }}
  readinessProbe:
    httpGet: {path: /readyz, port: admin}
    {{- toYaml $values.probes.readiness | nindent 4 }}
  livenessProbe:
    httpGet: {path: /livez, port: admin}
    {{- toYaml $values.probes.liveness | nindent 4 }}
  {{- end }}
  {{- $pause := int $values.drain.preStopSeconds }}
  {{- if eq .rank "follower" }}
  {{- /* All pods of a worker are told to stop at once, and the requests of the first one need the ranks of all. */}}
  {{- $pause = add $pause (int $values.drain.shutdownSeconds) | int }}
  {{- end }}
  {{- if $pause }}
  lifecycle:
    preStop:
      {{- if semverCompare ">=1.30-0" $root.Capabilities.KubeVersion.Version }}
      sleep: {seconds: {{ $pause }}}
      {{- else }}
      exec: {command: [sleep, {{ $pause | quote }}]}
      {{- end }}
  {{- end }}
  resources:
    {{- include "dspark.resources" . | nindent 4 }}
  securityContext:
    {{- include "dspark.containerSecurity" . | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - {name: config, mountPath: /etc/dspark, readOnly: true}
    - {name: cache, mountPath: /var/cache/dspark}
    - {name: tmp, mountPath: /tmp}
    {{- if and $isWorker $root.Values.shm.enabled }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- if and $isWorker $root.Values.adminKey.secretName }}
    - {name: admin-key, mountPath: /etc/dspark-admin, readOnly: true}
    {{- end }}
    {{- if ne $root.Values.model.source "builtin" }}
    {{- include "dspark.modelMount" . | nindent 4 }}
    {{- end }}
    {{- range $index, $path := (include "dspark.accelerator" . | fromYaml).hostPaths }}
    - {name: driver-{{ $index }}, mountPath: {{ $path }}, readOnly: true}
    {{- end }}
    {{- with $values.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "dspark.env" -}}
{{- $values := index .root.Values .role -}}
{{- /* Compiled kernels and whatever else libraries keep; the image itself cannot be written to. */ -}}
- name: HOME
  value: /var/cache/dspark
{{- if ne .role "router" }}
- name: NUMBA_CACHE_DIR
  value: /var/cache/dspark/numba
{{- /* A pod's own name means nothing to other pods. */}}
- name: DSPARK_TRANSFER__HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if eq .role "prefill" }}
- name: DSPARK_PREFILL__ADVERTISE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- if include "dspark.isMultinode" . }}
{{- /* Both come from the LeaderWorkerSet, which puts its variables first. */}}
- name: DSPARK_{{ upper .role }}__RENDEZVOUS__ADDRESS
  value: $(LWS_LEADER_ADDRESS):{{ $values.multinode.rendezvousPort }}
- name: DSPARK_{{ upper .role }}__RENDEZVOUS__NODE_RANK
  value: $(LWS_WORKER_INDEX)
{{- end }}
{{- end }}
{{- with (include "dspark.accelerator" . | fromYaml).env }}
{{ toYaml . }}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dspark.resources" -}}
{{- $values := index .root.Values .role -}}
{{- $extra := dict -}}
{{- with (include "dspark.accelerator" . | fromYaml).resourceName -}}
  {{- $_ := set $extra . $values.accelerator.count -}}
{{- end -}}
{{- if and (ne .role "router") .root.Values.rdma.enabled -}}
  {{- $_ := set $extra .root.Values.rdma.resourceName .root.Values.rdma.count -}}
{{- end -}}
{{- $resources := deepCopy $values.resources -}}
{{- if $extra -}}
  {{- $_ := set $resources "limits" (merge $extra ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Registering memory with a network card locks it. */}}
{{- define "dspark.containerSecurity" -}}
{{- $security := deepCopy .root.Values.securityContext -}}
{{- if and (ne .role "router") .root.Values.rdma.enabled -}}
  {{- $capabilities := $security.capabilities | default dict -}}
  {{- $added := append ($capabilities.add | default list) "IPC_LOCK" | uniq -}}
  {{- $_ := set $security "capabilities" (merge (dict "add" $added) $capabilities) -}}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{- define "dspark.volumes" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $isWorker := ne .role "router" -}}
- name: config
  configMap:
    name: {{ include "dspark.fullname" $root }}
    items:
      - {key: {{ .role }}.yaml, path: {{ .role }}.yaml}
- {name: cache, emptyDir: {}}
- {name: tmp, emptyDir: {}}
{{- if and $isWorker $root.Values.shm.enabled }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.shm.sizeLimit }}}
{{- end }}
{{- if and $isWorker $root.Values.adminKey.secretName }}
- name: admin-key
  secret:
    secretName: {{ $root.Values.adminKey.secretName }}
    defaultMode: 0440
    items:
      - {key: {{ $root.Values.adminKey.entry }}, path: key}
{{- end }}
{{- if ne $root.Values.model.source "builtin" }}
{{ include "dspark.modelVolume" . }}
{{- end }}
{{- range $index, $path := (include "dspark.accelerator" . | fromYaml).hostPaths }}
- {name: driver-{{ $index }}, hostPath: {path: {{ $path }}}}
{{- end }}
{{- with $values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dspark.spread" -}}
{{- $spread := .root.Values.topologySpread -}}
{{- $own := (index .root.Values .role).topologySpreadConstraints -}}
{{- if $own -}}
topologySpreadConstraints:
  {{- toYaml $own | nindent 2 }}
{{- else if and $spread.enabled (eq .rank "single") -}}
topologySpreadConstraints:
  - topologyKey: {{ $spread.topologyKey }}
    maxSkew: {{ $spread.maxSkew }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "dspark.selector" . | nindent 8 }}
{{- end -}}
{{- end -}}
