{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* The default image, without tag. */ -}}
{{- define "kpng.image" -}}
{{- get (dict "iptables" "kpng-iptables" "kernelspace" "kpng-windows") .Values.backend | default "kpng" -}}
{{- end -}}

{{- /* The port of an address. */ -}}
{{- define "kpng.port" -}}
{{ splitList ":" . | last }}
{{- end -}}
