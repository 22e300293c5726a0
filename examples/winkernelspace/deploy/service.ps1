# SPDX-License-Identifier: Apache-2.0
#
# Makes winkernelspace a Windows service that starts with the machine, for nodes
# without hostProcess containers (containerd before 1.7). As an administrator:
#
#   .\service.ps1 -Install -Program C:\k\winkernelspace.exe -Arguments '--network l2bridge --kubeconfig C:\k\config'
#   .\service.ps1 -Uninstall -Program C:\k\winkernelspace.exe -Arguments '--network l2bridge'
param(
    [switch]$Install,
    [switch]$Uninstall,
    [string]$Name = 'winkernelspace',
    [Parameter(Mandatory)][string]$Program,
    [string]$Arguments = ''
)
$ErrorActionPreference = 'Stop'

if ($Install) {
    New-Service -Name $Name -BinaryPathName "`"$Program`" $Arguments" -StartupType Automatic `
        -Description 'Proxies Kubernetes services by the Host Networking Service' | Out-Null
    # Started again after ten seconds whenever it fails.
    sc.exe failure $Name reset= 3600 actions= restart/10000 | Out-Null
    if ($LASTEXITCODE -ne 0) { throw "sc.exe failure $Name ended with $LASTEXITCODE" }
    Start-Service -Name $Name
} elseif ($Uninstall) {
    Stop-Service -Name $Name
    sc.exe delete $Name | Out-Null
    if ($LASTEXITCODE -ne 0) { throw "sc.exe delete $Name ended with $LASTEXITCODE" }
    # Load balancers stay when the program ends; this removes all that it made.
    $cleanup = Start-Process -FilePath $Program -ArgumentList "$Arguments --cleanup" -Wait -NoNewWindow -PassThru
    if ($cleanup.ExitCode -ne 0) { throw "$Program --cleanup ended with $($cleanup.ExitCode)" }
} else {
    throw 'Give -Install or -Uninstall.'
}
